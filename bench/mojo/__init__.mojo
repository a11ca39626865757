from .read import ReadBytes
