"""The measures that come with the package. Every file here may hold some; they register themselves when imported."""
