"""Video clips for tests: written from arrays, sent over TCP."""

import socket
import threading

import numpy as np


RATE = 10


def encode(path, pictures, rate=RATE, matrix=None):
    """Write RGB arrays as a video of the type that the file's suffix names.

    Args:
        matrix: a, b, c, d of the display matrix: (x, y) is shown at (ax + cy, bx + dy).
    """
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 5
        if matrix is not None:
            a, b, c, d = (part << 16 for part in matrix)
            stream.set_display_matrix((a, b, 0, c, d, 0, 0, 0, 1 << 30))
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def grays(levels):
    """A uniform gray image for each level 0..255."""
    return [np.full((48, 64, 3), level, dtype=np.uint8) for level in levels]


def noise(count):
    """Random images, which do not compress."""
    return np.random.default_rng(0).integers(0, 255, (count, 48, 64, 3), dtype=np.uint8)


class TCPServer:
    """`with TCPServer(parts) as address`: sends bytes to one client, then hangs up or falls silent."""

    def __init__(self, parts, hang_up=True):
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.address = f"tcp://127.0.0.1:{self.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._send, args=(parts, hang_up), daemon=True).start()

    def _send(self, parts, hang_up):
        try:
            client, _ = self.sockets[0].accept()
            self.sockets.append(client)
            for part in parts:
                client.sendall(part)
            if hang_up:
                client.close()
        except OSError:  # the client has left, or the test is over
            pass

    def __enter__(self):
        return self.address

    def __exit__(self, *_):
        for one in self.sockets:
            one.close()
