"""Reports for people: devices and their variables, memory, and how busy the towers are."""
