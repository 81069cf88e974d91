"""Files of the user: JSON documents and tables, and the folders where they lie."""
