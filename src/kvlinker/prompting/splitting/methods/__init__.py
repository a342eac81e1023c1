"""The splitters that ship with kvlinker, one file per kind of piece; every module of this package
is loaded."""
