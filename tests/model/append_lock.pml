/* The append lock, as docs/format.md has it: a word decides who appends, a locked byte for each slot proves that its owner lives.
 *
 * Each handle may be killed between any two steps and begins another life, with any slot that is free. So a slot gets a new holder while a
 * waiter is between its look at the byte and its swap. A sleep may end without a wake-up, since a dead owner wakes no waiter. With LIVE no
 * handle is killed and sleeps end only by wake-ups, so a lost wake-up is a handle that sleeps forever: an invalid end state.
 *
 * With none of these defined the search finds no error. Each one breaks a rule, and must give a counterexample:
 *   NO_GENERATION  the word of each take of a slot is the same
 *   NO_LOOK        a waiter takes the lock over without a look at the owner's byte
 *   FREE_ANY       a handle whose attempt was interrupted frees the word whatever it says
 * and with LIVE:
 *   NO_WAITERS     a waiter sleeps without the bit that tells the owner
 *   NO_RECHECK     it sleeps though the word is no longer the one that it saw
 *   FORGETFUL      a handle that has slept takes the lock without the bit, though others may sleep still
 */
#ifdef LIVE
#define HANDLES 3
#define TAKES 1 /* of each handle */
#else
#define HANDLES 2
#define TAKES 2
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

/* The word: slot + 1, the bit of waiters, and the generation, which no two takes have in common. */
#define WAITERS 4
#define SLOT(word) ((word) & 3)
#define GENERATION 8

byte word;
bool bytes[4]; /* of slot + 1: whether a living handle has it locked */
bool asleep[3];
byte owners;
byte deaths;

#ifdef LIVE
#define risk()
#else
inline risk() {
	if
	:: true
	:: atomic { deaths < DEATHS -> deaths++; goto die }
	fi
}
#endif

active [HANDLES] proctype handle() {
	byte slot, own, seen, takes, lives;
	bool has_slept, is_ours, had_waiters;
life:
	if
	:: atomic { !bytes[1] -> bytes[1] = true; slot = 1 }
	:: atomic { !bytes[2] -> bytes[2] = true; slot = 2 }
	:: atomic { !bytes[3] -> bytes[3] = true; slot = 3 }
	fi;
	risk();
	do
	:: takes < TAKES ->
#ifdef NO_GENERATION
		own = slot;
#else
		own = slot + GENERATION * (_pid + HANDLES * (TAKES * lives + takes));
#endif
		do
		:: is_ours -> break
		:: else ->
			/* Take the lock if it is free. */
			atomic {
				if
				:: word == 0 ->
#ifdef FORGETFUL
					word = own;
#else
					word = own + (has_slept -> WAITERS : 0);
#endif
					is_ours = true;
					owners++;
					assert(owners == 1);
					goto taken
				:: else -> seen = word
				fi
			}
			risk();
			/* Take it over from an owner whose byte is free. Our own byte doesn't count. */
			if
#ifndef NO_LOOK
			:: bytes[SLOT(seen)] && SLOT(seen) != slot
#endif
			:: else ->
				risk();
				atomic {
					if
					:: word == seen ->
						word = own | WAITERS;
						is_ours = true;
						owners++;
						assert(owners == 1);
						goto taken
					:: else
					fi
				}
			fi;
			/* The attempt failed, or an exception ended it: free what is ours. */
#ifdef FREE_ANY
			word = 0;
#else
			d_step { word = ((word | WAITERS) == (own | WAITERS) -> 0 : word) }
#endif
			/* Sleep until the owner wakes us. */
			seen = word;
			if
			:: seen == 0
			:: else ->
				risk();
				atomic {
					if
					:: word == seen ->
#ifndef NO_WAITERS
						seen = seen | WAITERS;
						word = seen
#endif
					:: else -> goto awake
					fi
				}
				has_slept = true;
				risk();
				atomic {
					if
#ifdef NO_RECHECK
					:: true -> asleep[_pid] = true
#else
					:: word == seen -> asleep[_pid] = true
					:: else -> goto awake
#endif
					fi
				}
				if
				:: !asleep[_pid]
#ifndef LIVE
				:: asleep[_pid] = false
#endif
				fi
			fi;
awake:
			seen = 0;
			goto next;
taken:
			has_slept = false;
			seen = 0;
next:
			skip
		od;
		risk();
		atomic {
			takes++;
			owners--;
			is_ours = false
		}
		risk();
		d_step {
			had_waiters = ((word & WAITERS) != 0);
			word = ((word | WAITERS) == (own | WAITERS) -> 0 : word)
		}
		risk();
		if
		:: had_waiters ->
			atomic { /* wake one, if any sleeps */
				if
				:: asleep[0] -> asleep[0] = false
				:: asleep[1] -> asleep[1] = false
				:: asleep[2] -> asleep[2] = false
				:: else
				fi
			}
		:: else
		fi
	:: else -> break
	od;
	bytes[slot] = false; /* the handle is closed */
	goto end;
#ifndef LIVE
die:
	atomic {
		bytes[slot] = false;
		asleep[_pid] = false;
		has_slept = false;
		owners = owners - is_ours;
		is_ours = false;
		slot = 0;
		own = 0;
		seen = 0;
		had_waiters = false;
		lives++
	}
	goto life;
#endif
end:
	skip
}
