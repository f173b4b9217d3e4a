"""What a book about training needs and a recorder does not: questions, and numbers measured where it is read."""
