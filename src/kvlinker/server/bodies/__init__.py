"""Request bodies as pydantic models: what each route accepts, and in which bounds."""
