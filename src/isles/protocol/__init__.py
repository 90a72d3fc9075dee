"""The round protocol, without I/O: records in, actions out.

`records` is what clusters tell each other, `board` what one cluster sees of it, `rounds` the transitions that any cluster may
propose, `parts` who reduces what, `cluster` what one cluster should do next.
"""

from isles.protocol.board import BEAT, LEASE, Board, View
from isles.protocol.cluster import (
    Action,
    Apply,
    Attempt,
    Begin,
    CatchUp,
    Cease,
    Create,
    Fetch,
    Local,
    Propose,
    Renew,
    WriteDone,
    WriteReady,
    after_applying,
    decide,
    given_up,
)
from isles.protocol.records import (
    DoneRecord,
    FiguresRecord,
    MemberRecord,
    Part,
    Participant,
    Phase,
    ReadyRecord,
    RoundRecord,
    State,
    pack,
    parse,
)
from isles.protocol.rounds import Rules, first_round, next_round

__all__ = [
    "BEAT",
    "LEASE",
    "Action",
    "Apply",
    "Attempt",
    "Begin",
    "Board",
    "CatchUp",
    "Cease",
    "Create",
    "DoneRecord",
    "Fetch",
    "FiguresRecord",
    "Local",
    "MemberRecord",
    "Part",
    "Participant",
    "Phase",
    "Propose",
    "ReadyRecord",
    "Renew",
    "RoundRecord",
    "Rules",
    "State",
    "View",
    "WriteDone",
    "WriteReady",
    "after_applying",
    "decide",
    "first_round",
    "given_up",
    "next_round",
    "pack",
    "parse",
]
