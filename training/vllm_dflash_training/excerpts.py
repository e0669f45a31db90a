# SPDX-License-Identifier: Apache-2.0
"""What of an answer a user might paste or ask about: texts, code, words, sentences."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from vllm_dflash_training.answers import Answer, split_sentences

_MIN_WORDS, _MAX_WORDS = 25, 260
_MIN_LINES, _MAX_LINES = 2, 45
# Of the characters of a text; calculations have more.
_MAX_DIGITS = 0.06
_BLOCK = re.compile(r"```([\w+#]*)[ \t]*\n(.*?)\n?```", re.DOTALL)
_FUNCTION = re.compile(r"\b(?:def|function|func|fn)\s+([A-Za-z]\w+)\s*[(<]")
_ITEM = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s", re.MULTILINE)
_NUMBERED = re.compile(r"^\s*\d+[.)]\s", re.MULTILINE)
_HEADING = re.compile(r"\*\*([^*\n]{4,40}?):?\*\*")
# What is said to the one who asked, and stands in no text.
_TO_THE_USER = re.compile(
    r"^(?:sure|certainly|absolutely|of course|great|okay|here(?:'s| is| are)\b|"
    r"i(?:'d| would) be (?:happy|glad)|i(?:'m| am) (?:happy|glad|sorry|here|not|an?)\b|"
    r"i (?:can|can't|cannot|could|don't|do not|assume|hope|understand|'ll)\b|"
    r"i(?:'ll| will)\b|let me know|feel free|thank you for|please (?:provide|let)|"
    r"as an? (?:ai|assistant|chatbot)|what an? )|"
    r"\b(?:smollm|hugging face|you asked|your question|an ai\b|can i assist|"
    r"can i help|(?:further|more) (?:questions|assistance)|assist you|help you with|"
    r"happy to (?:help|assist))\b",
    re.IGNORECASE,
)
# Of a sentence that goes on from another; at the beginning of a text it goes on from
# nothing.
_LINK = re.compile(
    r"(?:However|That being said|In addition|Additionally|Next|Therefore|So|Also), "
)
_CODE_LINE = re.compile(r"^\s*(?:def|import|return|print|const|public)\b|[;{]$", re.M)
_LANGUAGES = {
    "python": "Python",
    "py": "Python",
    "javascript": "JavaScript",
    "js": "JavaScript",
    "typescript": "TypeScript",
    "java": "Java",
    "c": "C",
    "cpp": "C++",
    "c++": "C++",
    "csharp": "C#",
    "go": "Go",
    "rust": "Rust",
    "ruby": "Ruby",
    "php": "PHP",
    "kotlin": "Kotlin",
    "swift": "Swift",
    "bash": "Bash",
    "sh": "Bash",
    "sql": "SQL",
    "r": "R",
}
_BUGS = [
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" == ", " != "),
    (" + ", " - "),
    (" * ", " + "),
    (" += 1", " += 2"),
    (" - 1", ""),
    ("[0]", "[1]"),
    (" and ", " or "),
    (" not in ", " in "),
    (" && ", " || "),
    ("i++", "i--"),
    ("True", "False"),
    ("true", "false"),
    ("range(1, ", "range("),
    ("max(", "min("),
]


@dataclass(frozen=True)
class Code:
    """A block of code.

    Attributes:
        tag: As it stands after the fence.
        language: Its name, or None if it isn't known.
    """

    text: str
    tag: str
    language: str | None

    @property
    def functions(self) -> list[str]:
        """Names of the functions that it defines."""
        return _FUNCTION.findall(self.text)


def pick_excerpt(rng: random.Random, answer: Answer) -> str | None:
    """Return the whole answer, or some of its paragraphs or sentences, if they do."""
    text = answer.text
    if answer.is_copy or "```" in text or _CODE_LINE.search(text):
        return None
    if has_many_numbers(text):
        return None
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", text)]
    paragraphs = [p for p in map(_without_asides, paragraphs) if p]
    if not paragraphs:
        return None
    kind = rng.random()
    if kind < 0.35:
        chosen = paragraphs
    elif kind < 0.7:
        number = min(rng.randint(1, 4), len(paragraphs))
        start = rng.randint(0, len(paragraphs) - number)
        chosen = paragraphs[start : start + number]
    else:
        prose = [p for p in paragraphs if not _ITEM.search(p)]
        sentences = [s for p in prose for s in split_sentences(p)]
        number = min(rng.randint(2, 9), len(sentences))
        start = rng.randint(0, len(sentences) - number)
        chosen = [" ".join(sentences[start : start + number])]
    while chosen and chosen[-1].endswith((":", ",")):
        # It leads to what isn't there.
        chosen = chosen[:-1]
    excerpt = "\n\n".join(chosen)
    if link := _LINK.match(excerpt):
        excerpt = excerpt[link.end() :]
        excerpt = excerpt[:1].upper() + excerpt[1:]
    if rng.random() < 0.8:
        excerpt = excerpt.replace("**", "")
    is_fit = _MIN_WORDS <= len(excerpt.split()) <= _MAX_WORDS
    return excerpt if is_fit else None


def _without_asides(paragraph: str) -> str:
    if _ITEM.search(paragraph):
        return paragraph
    kept = [s for s in split_sentences(paragraph) if not _TO_THE_USER.search(s)]
    return " ".join(kept) if "\n" not in paragraph else "\n".join(kept)


def find_code(text: str) -> list[Code]:
    """Return the blocks of code of a sensible length."""
    found = []
    for tag, code in _BLOCK.findall(text):
        is_fit = _MIN_LINES <= len(code.strip().splitlines()) <= _MAX_LINES
        language = _LANGUAGES.get(tag.lower())
        if is_fit and (language or not tag):
            found.append(Code(code.rstrip(), tag, language))
    return found


def with_a_bug(rng: random.Random, code: Code) -> Code:
    """Change one place of the code, if there is one that can be."""
    bugs = [bug for bug in _BUGS if bug[0] in code.text]
    if not bugs:
        return code
    right, wrong = rng.choice(bugs)
    parts = code.text.split(right)
    at = rng.randint(1, len(parts) - 1)
    text = right.join(parts[:at]) + wrong + right.join(parts[at:])
    return replace(code, text=text)


def has_many_numbers(text: str) -> bool:
    """Whether a text is a calculation rather than prose."""
    numbers = sum(c.isdigit() or c in "=+*/^\\$" for c in text.replace("**", ""))
    return numbers > _MAX_DIGITS * len(text)


def find_keywords(text: str, common: Collection[str]) -> list[str]:
    """Return what a text is about: headings, and words that it has several times.

    Args:
        common: Words that say little, in small letters.
    """
    headings = [h.strip() for h in _HEADING.findall(text)]
    words = re.findall(r"[^\W\d_]{5,}", text)
    counts = Counter(word for word in words if word.lower() not in common)
    often = [word for word, count in counts.most_common(6) if count > 1]
    return [h for h in headings if len(h.split()) < 5][:6] + often


def find_quotes(text: str) -> list[str]:
    """Return sentences that are short enough to be quoted."""
    sentences = [s for line in text.splitlines() if line for s in split_sentences(line)]
    return [
        s.rstrip(".")
        for s in sentences
        if 4 <= len(s.split()) <= 12 and not re.search(r"[\"“”`*#:]|^\W|^\d", s)
    ]


def list_length(text: str) -> int:
    """Return how many numbered items a text has; fewer than three are no list."""
    number = len(_NUMBERED.findall(text))
    return number if number >= 3 else 0
