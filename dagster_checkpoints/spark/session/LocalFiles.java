package dagster_checkpoints;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermission;
import java.util.EnumSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's local files, for which Java itself sets permissions and looks for symbolic links.
 *
 * Without its native library, which PySpark does not hold, Hadoop starts a process `chmod` or `readlink` for each.
 * The module local_files.py says how a session takes these classes, and how they are compiled.
 */
public final class LocalFiles {

    private LocalFiles() {}

    /** Local files without checksums. */
    public static class Raw extends RawLocalFileSystem {

        @Override
        public void setPermission(Path path, FsPermission permission) throws IOException {
            int mode = permission.toShort();
            if (mode >> 9 != 0) { // set-user-ID, set-group-ID or sticky, for which Java has no name
                super.setPermission(path, permission);
                return;
            }
            EnumSet<PosixFilePermission> granted = EnumSet.noneOf(PosixFilePermission.class);
            PosixFilePermission[] bits = PosixFilePermission.values(); // in the order of the mode's bits, from the owner's read
            for (int i = 0; i < bits.length; i++) {
                if ((mode & (0400 >> i)) != 0) {
                    granted.add(bits[i]);
                }
            }
            Files.setPosixFilePermissions(pathToFile(path).toPath(), granted);
        }

        @Override
        public FileStatus getFileLinkStatus(Path path) throws IOException {
            return Files.isSymbolicLink(pathToFile(path).toPath()) ? super.getFileLinkStatus(path) : getFileStatus(path);
        }
    }

    /** Local files with checksum files beside them: `fs.file.impl`, as Hadoop's LocalFileSystem. */
    public static class Checked extends LocalFileSystem {

        public Checked() {
            super(new Raw());
        }
    }

    /** Local files without checksums: `fs.AbstractFileSystem.file.impl`, as Hadoop's RawLocalFs. */
    public static class Unchecked extends DelegateToFileSystem {

        public Unchecked(URI uri, Configuration configuration) throws IOException, URISyntaxException {
            super(URI.create("file:///"), new Raw(), configuration, "file", false);
        }

        @Override
        public int getUriDefaultPort() {
            return -1;
        }

        @Override
        public boolean isValidName(String name) {
            return true;
        }
    }
}
