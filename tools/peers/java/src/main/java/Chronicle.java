import net.openhft.chronicle.bytes.Bytes;
import net.openhft.chronicle.queue.ChronicleQueue;
import net.openhft.chronicle.queue.ExcerptAppender;
import net.openhft.chronicle.queue.ExcerptTailer;

/** Appends to, and reads of, a queue of Chronicle: {@code Chronicle VERB PATH AMOUNT}. See tools/peers/java.py. */
public final class Chronicle {
    private static final int WARM_UP = 4; // times as long as the measurement
    private static final byte[] VALUE = "x".repeat(100).getBytes();

    public static void main(String[] arguments) throws Exception {
        try (ChronicleQueue queue = ChronicleQueue.single(arguments[1])) {
            switch (arguments[0]) {
                case "append" -> append(queue, Double.parseDouble(arguments[2]));
                case "replay" -> replay(queue, Integer.parseInt(arguments[2]));
                case "follow" -> follow(queue, Integer.parseInt(arguments[2]));
                case "send" -> send(queue, Integer.parseInt(arguments[2]));
                default -> throw new IllegalArgumentException(arguments[0]);
            }
        }
    }

    /** Appends for some seconds, after a warm-up and a line of input. */
    private static void append(ChronicleQueue queue, double seconds) throws Exception {
        ExcerptAppender appender = queue.createAppender();
        Bytes<?> value = Bytes.wrapForRead(VALUE);
        appendFor(appender, value, WARM_UP * seconds);
        Pipe.ready();
        Pipe.print(appendFor(appender, value, seconds));
    }

    private static double appendFor(ExcerptAppender appender, Bytes<?> value, double seconds) {
        long start = System.nanoTime();
        long end = start + (long) (seconds * 1e9);
        long done = 0;
        while (System.nanoTime() < end) {
            for (int i = 0; i < 10; i++, done++) {
                value.readPositionRemaining(0, VALUE.length);
                appender.writeBytes(value);
            }
        }
        return done * 1e9 / (System.nanoTime() - start);
    }

    /** Reads a number of records twice; the second time counts. */
    private static void replay(ChronicleQueue queue, int count) {
        ExcerptAppender appender = queue.createAppender();
        Bytes<?> value = Bytes.wrapForRead(VALUE);
        for (int i = 0; i < count; i++) {
            value.readPositionRemaining(0, VALUE.length);
            appender.writeBytes(value);
        }
        readAll(queue, count);
        Pipe.print(readAll(queue, count));
    }

    private static double readAll(ChronicleQueue queue, int count) {
        ExcerptTailer tailer = queue.createTailer().toStart();
        Bytes<?> found = Bytes.allocateElasticOnHeap(VALUE.length);
        long start = System.nanoTime();
        for (int i = 0; i < count; i++) {
            found.clear();
            if (!tailer.readBytes(found)) {
                throw new IllegalStateException("only " + i + " records");
            }
        }
        return count * 1e9 / (System.nanoTime() - start);
    }

    /** Spins until each new record arrives, and prints the latencies. */
    private static void follow(ChronicleQueue queue, int count) throws Exception {
        ExcerptTailer tailer = queue.createTailer().toEnd();
        Bytes<?> found = Bytes.allocateElasticOnHeap(VALUE.length);
        long[] latencies = new long[count];
        Pipe.ready();
        for (int i = 0; i < count; i++) {
            found.clear();
            while (!tailer.readBytes(found)) {
                Thread.onSpinWait();
            }
            latencies[i] = System.nanoTime() - found.readLong();
        }
        Pipe.print(latencies);
    }

    /** Appends the time each millisecond. */
    private static void send(ChronicleQueue queue, int count) throws Exception {
        ExcerptAppender appender = queue.createAppender();
        Bytes<?> value = Bytes.allocateElasticOnHeap(Long.BYTES);
        Pipe.ready();
        for (int i = 0; i < count; i++) {
            Thread.sleep(1);
            value.clear();
            value.writeLong(System.nanoTime());
            appender.writeBytes(value);
        }
    }
}
