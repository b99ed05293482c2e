"""Regular expressions of the values of `format` in JSON schemas that are enforced. Any other word is an annotation
(JSON Schema 2020-12, validation, 7.2). They are in ECMAScript's notation, and for the whole text."""

from __future__ import annotations

MAX_FRACTION = 9
"""Digits of a fraction of a second: nanoseconds. Without a limit, some models write digits until max_tokens."""

LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
FULL_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
OFFSET = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FULL_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]{{1,{MAX_FRACTION}}})?{OFFSET}"

OF_DAY = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
OF_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"(?:{OCTET}\.){{3}}{OCTET}"
PIECE = "[0-9A-Fa-f]{1,4}"
LAST_PIECES = f"(?:{PIECE}:{PIECE}|{IPV4})"
IPV6 = "|".join(
    [
        f"(?:{PIECE}:){{6}}{LAST_PIECES}",
        f"::(?:{PIECE}:){{5}}{LAST_PIECES}",
        *(f"(?:(?:{PIECE}:){{0,{n}}}{PIECE})?::(?:{PIECE}:){{{4 - n}}}{LAST_PIECES}" for n in range(5)),
        f"(?:(?:{PIECE}:){{0,5}}{PIECE})?::{PIECE}",
        f"(?:(?:{PIECE}:){{0,6}}{PIECE})?::",
    ]
)

ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
SHORT_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

ENCODED = "%[0-9A-Fa-f]{2}"
PATH_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{ENCODED})"
HOST = rf"(?:\[(?:{IPV6}|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|{ENCODED})*)"
USER = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{ENCODED})*@)?"
SEGMENTS = f"(?:/{PATH_CHAR}*)*"
HIERARCHY = rf"(?://{USER}{HOST}(?::[0-9]*)?{SEGMENTS}|/(?:{PATH_CHAR}+{SEGMENTS})?|(?:{PATH_CHAR}+{SEGMENTS})?)"
REST = rf"(?:{PATH_CHAR}|[/?])*"

STRING_FORMATS = {
    name: f"^(?:{text})$"
    for name, text in {
        # RFC 3339, 5.6, its days of a month (5.7), and appendix A.
        "date": FULL_DATE,
        "time": FULL_TIME,
        "date-time": f"{FULL_DATE}[Tt]{FULL_TIME}",
        "duration": f"P(?:[0-9]+W|{OF_DATE}(?:{OF_DAY})?|{OF_DAY})",
        # RFC 5321, 4.1.2, without quoted names; RFC 1123, 2.1.
        "email": rf"{ATOM}(?:\.{ATOM})*@(?:{LABEL}(?:\.{LABEL})*|\[{IPV4}\])",
        "hostname": rf"{SHORT_LABEL}(?:\.{SHORT_LABEL})*",
        # RFC 2673, 3.2; RFC 4291, 2.2; RFC 4122, 3; RFC 3986, appendix A.
        "ipv4": IPV4,
        "ipv6": IPV6,
        "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{HIERARCHY}(?:\?{REST})?(?:#{REST})?",
    }.items()
}
