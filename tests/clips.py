"""Clips for the tests of the video watcher: written from arrays, served over TCP."""

import socket
import threading

import numpy as np

from traffic_vlm.serving.video import Notes


RATE = 10


def encode(path, pictures, rate=RATE, codec="libx264", options=None, turned=0.0):
    """Write arrays uint8 [H,W,3] as a video, the end of whose name says its kind."""
    import av

    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        for number, picture in enumerate(pictures):
            if not number:
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = "yuv420p"
                stream.codec_context.gop_size = 5
                if turned:
                    stream.set_display_rotation(turned)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        container.mux(stream.encode())
    return path


def grays(levels, size=(48, 64)):
    """A picture of one gray for each level 0..255."""
    return [np.full((*size, 3), level, dtype=np.uint8) for level in levels]


def quiet():
    return Notes(say=lambda text: None)


class TCPServer:
    """`with TCPServer(parts) as address`: sends bytes, part by part, to one client and hangs up, or falls silent."""

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
