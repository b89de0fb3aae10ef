"""The formats of journals, one in each file; `kvspool.journal.format` defines their interface."""

from kvspool.journal.format import Format
from kvspool.journal.formats.fflg import Fflg
from kvspool.journal.formats.fixed import Fixed
from kvspool.journal.formats.kvj import Kvj
from kvspool.journal.formats.sej import Sej

FORMATS: dict[str, type[Format]] = {Kvj.name: Kvj, Sej.name: Sej, Fflg.name: Fflg, Fixed.name: Fixed}

__all__ = ["FORMATS", "Fflg", "Fixed", "Kvj", "Sej"]
