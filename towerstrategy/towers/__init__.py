"""One call a tower: contexts and meetings; traced once and copied, or a thread each."""
