"""Plans, rows and references for tests of the decoder's ops and models."""
