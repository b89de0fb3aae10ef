/* Sleeping and waking, as docs/format.md has it under "Wait" and at the end of "Append".
 *
 * Each reader has a seat: a byte of `wanted`, and a semaphore. The tail as a writer has stored it, and a byte of `wanted` as a reader has,
 * reach the memory some time later, as on every machine; a fence waits until they are there. No sleep ends by itself here, so a wake-up that is lost is a
 * reader that sleeps for ever, which the search reports as an invalid end state.
 *
 * With none of these defined the search finds no error. Each one breaks a rule, and must give a counterexample:
 *   NO_SECOND_LOOK   a reader sleeps after asking, without another look at the tail
 *   NO_FENCE_READER  it looks again before its asking has reached the memory
 *   NO_FENCE_WRITER  a writer looks at `wanted` before its tail has reached the memory
 *   TORN_EXCHANGE    a writer reads `wanted` and then clears it, in two steps (which is what the interpreted twin does)
 * With POLL, where a sleep may end by itself, none of them loses anything: that is what the poll is for.
 */
#define READERS 2
#define WRITERS 2
#ifdef POLL
#define RECORDS 1 /* of each writer */
#else
#define RECORDS 2
#endif

byte tail;
byte tail_seen; /* what has reached the memory */
bool wanted[READERS];
bool asked[READERS]; /* stored, and has not reached the memory */
byte semaphores[READERS];
bool lock;
byte done;

active proctype memory_order() {
	do
	:: tail_seen != tail -> tail_seen = tail
	:: d_step { asked[0] -> asked[0] = false; wanted[0] = true }
	:: d_step { asked[1] -> asked[1] = false; wanted[1] = true }
	:: done == READERS + WRITERS && tail_seen == tail && !asked[0] && !asked[1] -> break
	od
}

active [WRITERS] proctype writer() {
	byte left = RECORDS;
	bool first, second;
	do
	:: left > 0 ->
		atomic { !lock -> lock = true }
		tail_seen == tail; /* the lock orders the memory */
		tail++;
#ifndef NO_FENCE_WRITER
		tail_seen == tail;
#endif
		if
		:: wanted[0] || wanted[1] ->
#ifdef TORN_EXCHANGE
			d_step { first = wanted[0]; second = wanted[1] }
			d_step { wanted[0] = false; wanted[1] = false }
#else
			d_step { first = wanted[0]; second = wanted[1]; wanted[0] = false; wanted[1] = false }
#endif
		:: else
		fi;
		lock = false;
		if
		:: first -> semaphores[0]++
		:: else
		fi;
		if
		:: second -> semaphores[1]++
		:: else
		fi;
		first = false;
		second = false;
		left--
	:: else -> break
	od;
	done++
}

active [READERS] proctype reader() {
	byte seat = _pid - WRITERS - 1;
	byte taken;
	do
	:: taken < WRITERS * RECORDS ->
		asked[seat] = true;
#ifndef NO_FENCE_READER
		!asked[seat];
#endif
#ifndef NO_SECOND_LOOK
		if
		:: tail_seen > taken -> taken = tail_seen
		:: else ->
#endif
			if
			:: d_step { semaphores[seat] > 0 -> semaphores[seat]-- }
#ifdef POLL
			:: true
#endif
			fi;
			taken = tail_seen
#ifndef NO_SECOND_LOOK
		fi
#endif
	:: else -> break
	od;
	done++
}
