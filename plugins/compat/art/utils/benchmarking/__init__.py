"""Tables and charts of the rollouts in a folder of models (ART's `art.utils.benchmarking`). They need the extra
`plotting`: polars and matplotlib."""
