from tests.train.conftest import mesh

__all__ = ["mesh"]
