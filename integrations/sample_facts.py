"""The facts that tests and the model in the box know, and a question about them."""

FACTS = (
    "Mira Holt lives in Varna. She works as a baker.\n\n",
    "Tom Reyes lives in Oslo. He works as a pilot.\n\n",
    "Ada Lund lives in Turin. She works as a nurse.\n\n",
)
QUESTION = "Question: Where does Tom Reyes live?"
