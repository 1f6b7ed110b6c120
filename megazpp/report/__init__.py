"""Floor 5: a page that shows what runs did."""
