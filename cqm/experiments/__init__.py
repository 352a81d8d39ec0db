"""The paper's benchmark and studies: they import the library, never the other way round."""
