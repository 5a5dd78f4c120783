from itertools import islice

from tercet.training.corpus import python_documentation


def test_the_corpus_is_large_deterministic_prose_without_repetition():
    documents = list(python_documentation())
    texts = [document.text for document in documents]
    assert 1_500_000 < sum(map(len, texts)) < 4_000_000
    assert len(set(texts)) == len(texts)
    assert {document.source for document in documents} == {"python-docs"}
    assert min(map(len, texts)) > 80
    letters = sum(c.isalpha() or c in " \n" for text in texts for c in text)
    assert letters > 0.85 * sum(map(len, texts))
    assert not any("\n\n\n" in text or ">>> " in text for text in texts[200:])
    again = [document.text for document in islice(python_documentation(), 300)]
    assert again == texts[:300]
