"""Other machines: they offer their devices to a server (`art-server host --join URL`), which starts engines and ranks there."""
