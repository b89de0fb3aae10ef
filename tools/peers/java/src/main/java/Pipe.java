import java.util.Arrays;

/** The way of a program's results to the bench: lines. */
final class Pipe {
    /** Says that the work can begin, and waits for a line. */
    static void ready() throws Exception {
        say("ready");
        while (System.in.read() != '\n') {
            // The rest of the line.
        }
    }

    /** Prints a rate, per second. */
    static void print(double rate) {
        say(Double.toString(rate));
    }

    /** Prints the median of latencies, in ns. */
    static void print(long[] latencies) {
        Arrays.sort(latencies);
        say(Long.toString(latencies[latencies.length / 2]));
    }

    /** Prints a line that differs from those of libraries. */
    private static void say(String line) {
        System.out.println("bench: " + line);
        System.out.flush();
    }
}
