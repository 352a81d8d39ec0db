"""The paper's benchmark. It imports the library, never the other way round."""
