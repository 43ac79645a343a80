"""Names to sort, the shortest first; each list has no duplicates."""

from __future__ import annotations

_FIRST = (
    # The first twenty have different initials.
    "Ada Bob Cal Dan Eva Fay Gus Hal Ida Joe Kim Lou Max Ned Pam Ray Sue Tom Una Zoe "
    "Amy Ben Dee Eli Gil Ian Jan Ken Leo Mia Nia Pat Ron Sam Ted Val Wes Abe Bea Lea "
    "Alma Bert Cora Dora Emil Fern Gwen Hugo Iris Jude Kurt Lena Mila Nora Otto Paul Rosa Saul "
    "Theo Vera Walt Yara"
)
_FAMILY = (
    "Ash Bell Cole Dunn Ek Frey Gray Holm Ito Jung Kerr Lund Moss Nash Orr Park Quist Reed Stone "
    "Todd Ueda Voss Webb Xu York Zorn Abbas Boyd Cruz Diaz Egan Fox Gale Hill Ives Jain Khan Levy "
    "Mora Neri Oduya Pohl Rao Sato Tran Urban Vega Wolf Young Zeller Amato Bauer Costa Duval "
    "Evans Fuchs Grant Hayes Irwin Jonas Klein Lopez"
)

FIRST_NAMES = tuple(_FIRST.split())
FAMILY_NAMES = tuple(_FAMILY.split())
