"""The page of a report: run folders are read and checked, put into words, and set in HTML."""


# Words


def number(value: float, digits: int = 1) -> str:
    """A number with so many decimals, a real minus and no negative zero."""
    text = f"{value:,.{digits}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def percent(value: float, digits: int = 1) -> str:
    """A number with a percent sign."""
    return number(value, digits) + "\u00a0%"  # a line must not end between the two


def count(number: int, thing: str) -> str:
    """How many of a thing, with its plural."""
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Say a time as people do.

    >>> duration(42.2), duration(754), duration(7260)
    ('42 s', '12 min 34 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
