"""What was asked for -> who does what, where: devices, homes."""
