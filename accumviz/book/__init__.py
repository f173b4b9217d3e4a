"""The book's instruments: questions, explorers, labs, ranks in a cell. Nothing outside this folder imports them."""
