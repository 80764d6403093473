"""What programs written for ART use: subclasses of the client's models and backends with ART's arguments, and ART's functions.
`art` and the modules at ART's import paths name them."""
