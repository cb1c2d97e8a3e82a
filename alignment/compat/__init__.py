"""What other libraries' scripts expect of this package."""
