"""The client's own models and backends. `art_compat` has subclasses of them with ART's arguments, and `art` names the subclasses."""
