"""Other methods and other libraries."""
