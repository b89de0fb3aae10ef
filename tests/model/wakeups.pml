/* Sleeping and waking, as docs/format.md has it under "Wait" and at the end of "Append".
 *
 * All readers sleep on one word, `rings`, a futex: the kernel compares the word with the loaded value and sleeps in one step. A writer's
 * store of the tail, and a reader's store of the byte of `wanted`, reach the memory some time later, as on every machine; a fence waits
 * until they are there. Writers wake after they have freed the lock, so two may do it at the same time. Sleeps end only by wake-ups here, so
 * a lost wake-up is a reader that sleeps forever, which the search reports as an invalid end state.
 *
 * With none of these defined the search finds no error. Each one breaks a rule, and must give a counterexample:
 *   NO_SECOND_LOOK   a reader sleeps after asking, without another look at the tail
 *   NO_FENCE_READER  it looks again before its asking has reached the memory
 *   NO_FENCE_WRITER  a writer looks at `wanted` before its tail has reached the memory
 *   LATE_RINGS       a reader loads `rings` after its second look
 *   NO_COUNT         a writer wakes without changing `rings`
 *   WAKE_ONE         a writer wakes one sleeper instead of all
 * With POLL, where a sleep may end without a wake-up, none of them loses anything: that is the purpose of the poll.
 */
#define READERS 2
#define WRITERS 2
#define RECORDS 1 /* of each writer */

byte tail;
byte tail_seen; /* the value that has reached the memory */
bool wanted;
bool asked[READERS]; /* stored, and has not reached the memory */
byte rings;
bool asleep[READERS];
bool lock;
byte done;

active proctype memory_order() {
	do
	:: tail_seen != tail -> tail_seen = tail
	:: d_step { asked[0] -> asked[0] = false; wanted = true }
	:: d_step { asked[1] -> asked[1] = false; wanted = true }
	:: done == READERS + WRITERS && tail_seen == tail && !asked[0] && !asked[1] -> break
	od
}

active [WRITERS] proctype writer() {
	byte left = RECORDS;
	bool rang;
	do
	:: left > 0 ->
		atomic { !lock -> lock = true }
		tail_seen == tail; /* the lock orders the memory */
		tail++;
#ifndef NO_FENCE_WRITER
		tail_seen == tail;
#endif
		if
		:: wanted -> d_step { rang = wanted; wanted = false }
		:: else
		fi;
		lock = false;
		if
		:: rang ->
#ifndef NO_COUNT
			rings++;
#endif
#ifdef WAKE_ONE
			if
			:: asleep[0] -> asleep[0] = false
			:: else -> asleep[1] = false
			fi
#else
			d_step { asleep[0] = false; asleep[1] = false }
#endif
		:: else
		fi;
		rang = false;
		left--
	:: else -> break
	od;
	done++
}

active [READERS] proctype reader() {
	byte number = _pid - WRITERS - 1;
	byte taken;
	byte seen;
	do
	:: taken < WRITERS * RECORDS ->
		seen = rings;
		asked[number] = true;
#ifndef NO_FENCE_READER
		!asked[number];
#endif
#ifndef NO_SECOND_LOOK
		if
		:: tail_seen > taken -> taken = tail_seen
		:: else ->
#endif
#ifdef LATE_RINGS
			seen = rings;
#endif
			d_step { asleep[number] = (rings == seen) };
			if
			:: !asleep[number]
#ifdef POLL
			:: d_step { asleep[number] -> asleep[number] = false }
#endif
			fi;
			taken = tail_seen
#ifndef NO_SECOND_LOOK
		fi
#endif
		;
		seen = 0
	:: else -> break
	od;
	done++
}
