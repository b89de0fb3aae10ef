import io.aeron.ExclusivePublication;
import io.aeron.Subscription;
import io.aeron.archive.Archive;
import io.aeron.archive.ArchiveThreadingMode;
import io.aeron.archive.ArchivingMediaDriver;
import io.aeron.archive.client.AeronArchive;
import io.aeron.archive.status.RecordingPos;
import io.aeron.driver.MediaDriver;
import io.aeron.driver.ThreadingMode;
import java.io.File;
import org.agrona.concurrent.UnsafeBuffer;
import org.agrona.concurrent.status.CountersReader;

/** A media driver with an archive, and its clients: {@code Aeron VERB PATH STREAM AMOUNT LEVEL}. See tools/peers/java.py. */
public final class Aeron {
    private static final String CHANNEL = "aeron:ipc";
    private static final int REPLAYED = 500; // added to the stream of a replay
    private static final int WARM_UP = 4; // times as long as the measurement
    private static final UnsafeBuffer VALUE = new UnsafeBuffer("x".repeat(100).getBytes());

    private final AeronArchive archive;
    private final int stream;
    private final boolean isDurable;

    private Aeron(AeronArchive archive, int stream, boolean isDurable) {
        this.archive = archive;
        this.stream = stream;
        this.isDurable = isDurable;
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("serve")) {
            serve(arguments[1], arguments[2], arguments[4].equals("disk") ? 2 : 0);
            return;
        }
        AeronArchive.Context context = new AeronArchive.Context()
            .aeronDirectoryName(arguments[1] + "/driver")
            .controlRequestChannel(CHANNEL)
            .controlRequestStreamId(AeronArchive.Configuration.LOCAL_CONTROL_STREAM_ID_DEFAULT)
            .controlResponseChannel(CHANNEL);
        try (AeronArchive archive = AeronArchive.connect(context)) {
            Aeron aeron = new Aeron(archive, Integer.parseInt(arguments[2]), arguments[4].equals("disk"));
            switch (arguments[0]) {
                case "append" -> aeron.append(Double.parseDouble(arguments[3]));
                case "replay" -> aeron.replay(Integer.parseInt(arguments[3]));
                case "follow" -> aeron.follow(Integer.parseInt(arguments[3]));
                case "send" -> aeron.send(Integer.parseInt(arguments[3]));
                default -> throw new IllegalArgumentException(arguments[0]);
            }
        }
    }

    /** Runs the driver and the archive until a line of input. */
    private static void serve(String path, String port, int syncLevel) throws Exception {
        MediaDriver.Context driver = new MediaDriver.Context()
            .aeronDirectoryName(path + "/driver")
            .threadingMode(ThreadingMode.SHARED);
        Archive.Context archive = new Archive.Context()
            .aeronDirectoryName(path + "/driver")
            .archiveDir(new File(path, "archive"))
            .controlChannel("aeron:udp?endpoint=127.0.0.1:" + port)
            .replicationChannel("aeron:udp?endpoint=127.0.0.1:0")
            .threadingMode(ArchiveThreadingMode.SHARED)
            .fileSyncLevel(syncLevel)
            .catalogFileSyncLevel(syncLevel);
        try (ArchivingMediaDriver both = ArchivingMediaDriver.launch(driver, archive)) {
            Pipe.ready();
        }
    }

    /** Publishes for some seconds, after a warm-up and a line of input, until the archive has recorded everything. */
    private void append(double seconds) throws Exception {
        ExclusivePublication publication = archive.addRecordedExclusivePublication(CHANNEL, stream);
        int counter = counterOf(publication);
        publishFor(publication, counter, WARM_UP * seconds);
        Pipe.ready();
        Pipe.print(publishFor(publication, counter, seconds));
    }

    private double publishFor(ExclusivePublication publication, int counter, double seconds) {
        long start = System.nanoTime();
        long end = start + (long) (seconds * 1e9);
        long done = 0;
        while (System.nanoTime() < end) {
            for (int i = 0; i < 10; i++, done++) {
                publish(publication, VALUE);
                if (isDurable) {
                    awaitRecorded(counter, publication.position());
                }
            }
        }
        awaitRecorded(counter, publication.position());
        return done * 1e9 / (System.nanoTime() - start);
    }

    /** Replays a number of records twice; the second time counts. */
    private void replay(int count) {
        ExclusivePublication publication = archive.addRecordedExclusivePublication(CHANNEL, stream);
        int counter = counterOf(publication);
        for (int i = 0; i < count; i++) {
            publish(publication, VALUE);
        }
        awaitRecorded(counter, publication.position());
        long recording = RecordingPos.getRecordingId(counters(), counter);
        readAll(recording, publication.position(), count);
        Pipe.print(readAll(recording, publication.position(), count));
    }

    private double readAll(long recording, long length, int count) {
        long start = System.nanoTime();
        int[] done = {0};
        try (Subscription replayed = archive.replay(recording, 0, length, CHANNEL, stream + REPLAYED)) {
            while (done[0] < count) {
                if (replayed.poll((buffer, offset, size, header) -> done[0]++, 1000) == 0) {
                    Thread.onSpinWait();
                }
            }
        }
        return count * 1e9 / (System.nanoTime() - start);
    }

    /** Spins until each new message arrives, and prints the latencies. */
    private void follow(int count) throws Exception {
        long[] latencies = new long[count];
        int[] done = {0};
        try (Subscription live = archive.context().aeron().addSubscription(CHANNEL, stream)) {
            Pipe.ready();
            while (done[0] < count) {
                int found = live.poll((buffer, offset, size, header) -> latencies[done[0]++] = System.nanoTime() - buffer.getLong(offset), 1);
                if (found == 0) {
                    Thread.onSpinWait();
                }
            }
        }
        Pipe.print(latencies);
    }

    /** Publishes the time each millisecond. */
    private void send(int count) throws Exception {
        ExclusivePublication publication = archive.addRecordedExclusivePublication(CHANNEL, stream);
        int counter = counterOf(publication);
        UnsafeBuffer value = new UnsafeBuffer(new byte[Long.BYTES]);
        Pipe.ready();
        for (int i = 0; i < count; i++) {
            Thread.sleep(1);
            value.putLong(0, System.nanoTime());
            publish(publication, value);
        }
        awaitRecorded(counter, publication.position());
    }

    private static void publish(ExclusivePublication publication, UnsafeBuffer value) {
        long position;
        while ((position = publication.offer(value)) < 0) {
            if (position != ExclusivePublication.BACK_PRESSURED && position != ExclusivePublication.ADMIN_ACTION) {
                throw new IllegalStateException("the publication is not connected: " + position);
            }
            Thread.onSpinWait();
        }
    }

    private CountersReader counters() {
        return archive.context().aeron().countersReader();
    }

    private int counterOf(ExclusivePublication publication) {
        int counter;
        do {
            counter = RecordingPos.findCounterIdBySession(counters(), publication.sessionId(), archive.archiveId());
            Thread.onSpinWait();
        } while (counter < 0);
        return counter;
    }

    private void awaitRecorded(int counter, long position) {
        while (counters().getCounterValue(counter) < position) {
            Thread.onSpinWait();
        }
    }
}
