import pytest

pytest.importorskip("peft", reason="peft comes with the extra lora")
