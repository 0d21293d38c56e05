"""deep_ep inside of other libraries. Nothing here is imported by the package itself."""
