"""The same, in a Python that was started without ampatch, on a model that is on the CPU."""

import ampatch.apex

ampatch.apex.install()

import ignite_trainer  # noqa: E402 - this is what it is about

ignite_trainer.main(["--device", "cpu"])
