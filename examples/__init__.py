"""Short programs to learn from. Run each as its first lines say; nothing here is imported by another."""
