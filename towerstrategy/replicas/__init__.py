"""A replica function a tower: traced once and copied, or in a thread for each tower."""
