/* The protocol between one writer at a time and readers without a lock, as docs/format.md has it under "Append" and "Read".
 *
 * Every frame is one cell of the ring, in two halves, so that a copy can be torn; sequence and position are the same number. A
 * writer may be killed between any two stores, and another one continues. Its stores wait in a buffer, from which they reach memory in any order
 * that a weakly ordered machine allows: a release store after all earlier ones, stores to one place in their order, others as they like; a
 * fence waits until all are there. The kernel's lock also makes all stores visible, so a new writer begins with none waiting.
 *
 * With none of these defined the search finds no error. Each one breaks a rule, and must give a counterexample:
 *   HEAD_LATE    head advances after the frame that it should protect was overwritten
 *   NO_RECHECK   a reader believes its copy without another look at head
 *   CHECK_EARLY  it looks at head before it copies
 *   NO_FENCE     head may reach the memory after the frame
 *   PLAIN_TAIL   tail may reach the memory before the frame
 *   ONE_MARK     the mark that belongs to the current tail is overwritten
 */
#define CELLS 2
#ifndef FRAMES
#define FRAMES 4
#endif
#define DEATHS 1

#define HEAD 0
#define MIN_SEQ 1
#define TAIL 2
#define MARKS 3 /* two marks: tail, next sequence */
#define LOW_HALF 7
#define HIGH_HALF (LOW_HALF + CELLS)
#define PLACES (HIGH_HALF + CELLS)
#define WAITING 8

byte memory[PLACES];

/* The writer's stores that have not reached the memory. */
byte waits_place[WAITING];
byte waits_value[WAITING];
bool waits_release[WAITING];
byte waiting;

bool is_done;
byte deaths;

inline put(to, what, is_release) {
	atomic {
		assert(waiting < WAITING);
		waits_place[waiting] = to;
		waits_value[waiting] = what;
		waits_release[waiting] = is_release;
		waiting++
	}
}

inline fence() {
	waiting == 0
}

/* Here the writer may be killed; its stores reach the memory all the same. */
inline risk() {
	if
	:: true
	:: deaths < DEATHS -> deaths++; goto begin
	fi
}

active proctype memory_order() {
	byte which, earlier;
	bool may;
	do
	:: atomic {
		waiting > 0;
		do /* any one of those that wait */
		:: which + 1 < waiting -> which++
		:: break
		od;
		may = !(waits_release[which] && which > 0);
		do
		:: earlier < which ->
			if
			:: waits_place[earlier] == waits_place[which] -> may = false
			:: else
			fi;
			earlier++
		:: else -> break
		od;
		if
		:: may ->
			memory[waits_place[which]] = waits_value[which];
			waiting--;
			do
			:: which < waiting ->
				waits_place[which] = waits_place[which + 1];
				waits_value[which] = waits_value[which + 1];
				waits_release[which] = waits_release[which + 1];
				which++
			:: else -> break
			od;
			waits_place[waiting] = 0;
			waits_value[waiting] = 0;
			waits_release[waiting] = false
		:: else
		fi;
		which = 0;
		earlier = 0;
		may = false
	   }
	:: is_done && waiting == 0 -> break
	od
}

active proctype writer() {
	byte tail, head, mark, content;
begin:
	fence(); /* the lock was free: what its last holder stored is there */
	d_step {
		tail = memory[TAIL];
		head = memory[HEAD];
		mark = (memory[MARKS] == tail -> 0 : 1);
		assert(memory[MARKS + 2 * mark] == tail); /* else the log is damaged */
		assert(memory[MARKS + 2 * mark + 1] == tail)
	}
	do
	:: tail < FRAMES ->
		content = 4 * tail + deaths; /* the successor of a killed writer writes other contents in the same place */
#ifndef HEAD_LATE
		if
		:: tail + 1 - head > CELLS ->
			head = tail + 1 - CELLS;
			put(MIN_SEQ, head, true);
			risk();
			put(HEAD, head, true);
			risk();
#ifndef NO_FENCE
			fence()
#endif
		:: else
		fi;
#endif
		put(LOW_HALF + tail % CELLS, content, false);
		risk();
		put(HIGH_HALF + tail % CELLS, content, false);
		risk();
#ifdef HEAD_LATE
		if
		:: tail + 1 - head > CELLS ->
			head = tail + 1 - CELLS;
			put(MIN_SEQ, head, true);
			put(HEAD, head, true);
			fence()
		:: else
		fi;
#endif
#ifndef ONE_MARK
		mark = 1 - mark;
#endif
		tail++;
		put(MARKS + 2 * mark + 1, tail, true);
		risk();
		put(MARKS + 2 * mark, tail, true);
		risk();
#ifdef PLAIN_TAIL
		put(TAIL, tail, false);
#else
		put(TAIL, tail, true);
#endif
		fence();
		risk()
	:: else -> break
	od;
	fence();
	is_done = true
}

/* Accounts for every sequence: it takes the record, or knows that it was overwritten. */
active proctype reader() {
	byte next, tail, head, low_half, high_half;
	do
	:: next < FRAMES ->
		tail = memory[TAIL];
		if
		:: next < tail ->
#ifdef CHECK_EARLY
			head = memory[HEAD];
#endif
			/* A copy goes in no particular order. */
			if
			:: low_half = memory[LOW_HALF + next % CELLS]; high_half = memory[HIGH_HALF + next % CELLS]
			:: high_half = memory[HIGH_HALF + next % CELLS]; low_half = memory[LOW_HALF + next % CELLS]
			fi;
#ifdef NO_RECHECK
			head = 0;
#else
#ifndef CHECK_EARLY
			head = memory[HEAD];
#endif
#endif
			if
			:: head > next ->
				next = head; /* a Gap of exactly these; min_seq is at least as far */
				assert(memory[MIN_SEQ] >= next)
			:: else ->
				assert(low_half == high_half);
				assert(low_half / 4 == next);
				next++
			fi;
			low_half = 0;
			high_half = 0;
			head = 0
		:: else
		fi;
		tail = 0
	:: else -> break
	od;
	assert(next == FRAMES)
}

/* Asks where the log ends, as an opening process does: the mark that belongs to the tail. */
active proctype opener() {
	byte tail, sequence, mark;
	do
	:: tail = memory[TAIL];
	   if
	   :: memory[MARKS] == tail -> mark = 1
	   :: else ->
		if
		:: memory[MARKS + 2] == tail -> mark = 3
		:: else -> mark = 0
		fi
	   fi;
	   if
	   :: mark > 0 ->
		sequence = memory[MARKS + mark];
		if
		:: memory[TAIL] == tail -> assert(sequence == tail); break
		:: else
		fi
	   :: else -> assert(memory[TAIL] != tail) /* nothing has moved, and there is no mark: damaged */
	   fi
	od
}
