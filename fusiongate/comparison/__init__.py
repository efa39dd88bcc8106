"""What "same" means, and what differs: contracts, verdicts, bits, mismatch statistics, md5 digests."""
