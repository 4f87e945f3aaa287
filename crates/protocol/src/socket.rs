//! Packets and file descriptors over a Unix socket.
//!
//! Raw system calls by `rustix`: never a cancellation point, never through an interposed C library.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::wire::{MAX_FDS, MAX_PACKET};

/// Connects to a listening packet socket.
///
/// # Errors
/// The system's; `NOENT` and `CONNREFUSED` mean that no daemon listens there, `ACCESS` that it is another user's.
pub fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = packet_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The same, for callers that must not wait: connecting, sending and receiving end after `patience` each.
///
/// # Errors
/// As [`connect`], and `AGAIN` when the time is over.
pub fn connect_within(path: &Path, patience: std::time::Duration) -> Result<OwnedFd, Errno> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let socket = packet_socket()?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(patience))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// A packet socket that nobody inherits over `exec`.
fn packet_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Listens for packets at `path`, which must not exist.
///
/// # Errors
/// The system's, `ADDRINUSE` if the path exists.
pub fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = packet_socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Sends one packet with descriptors beside it. The peer gets duplicates.
///
/// # Errors
/// The system's: `PIPE` or `CONNRESET` if the peer is gone (no signal is raised), `AGAIN` on a full non-blocking
/// socket. More than [`MAX_FDS`] descriptors are `INVAL`.
pub fn send(socket: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    if fds.len() > MAX_FDS {
        return Err(Errno::INVAL);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            &socket,
            &[IoSlice::new(packet)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    if sent == packet.len() {
        Ok(())
    } else {
        Err(Errno::MSGSIZE)
    }
}

/// One packet as it arrived.
#[derive(Debug, Default)]
pub struct Received {
    /// The packet.
    pub packet: Vec<u8>,
    /// The descriptors beside it, already close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Waits for one packet. `None` means that the peer closed its end.
///
/// # Errors
/// The system's; `AGAIN` on an empty non-blocking socket, `MSGSIZE` if the packet was larger than [`MAX_PACKET`].
pub fn recv(socket: impl AsFd) -> Result<Option<Received>, Errno> {
    let mut packet = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let result = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut packet)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if result.bytes == 0 {
        return Ok(None);
    }
    if result.flags.contains(rustix::net::ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    packet.truncate(result.bytes);
    Ok(Some(Received { packet, fds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn packets_keep_their_borders_and_bring_descriptors() {
        let (a, b) = pair();
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut file = std::fs::File::from(memfd.try_clone().unwrap());
        file.write_all(b"through the socket").unwrap();
        send(&a, b"one", &[memfd.as_fd(), memfd.as_fd()]).unwrap();
        send(&a, b"second", &[]).unwrap();
        let first = recv(&b).unwrap().unwrap();
        assert_eq!((first.packet.as_slice(), first.fds.len()), (&b"one"[..], 2));
        let mut same = std::fs::File::from(first.fds.into_iter().next().unwrap());
        let mut text = String::new();
        same.rewind().unwrap();
        same.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through the socket");
        assert_eq!(recv(&b).unwrap().unwrap().packet, b"second");
    }

    #[test]
    fn a_closed_peer_is_an_end_for_the_reader_and_an_error_for_the_writer() {
        let (a, b) = pair();
        drop(a);
        assert!(recv(&b).unwrap().is_none());
        assert!(matches!(send(&b, b"x", &[]), Err(Errno::PIPE | Errno::CONNRESET)));
    }

    #[test]
    fn nobody_listens() {
        let folder = std::env::temp_dir().join(format!("ebb-protocol-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("s");
        assert_eq!(connect(&path).unwrap_err(), Errno::NOENT);
        let listener = listen(&path).unwrap();
        assert!(connect(&path).is_ok());
        assert_eq!(listen(&path).unwrap_err(), Errno::ADDRINUSE);
        drop(listener);
        assert_eq!(connect(&path).unwrap_err(), Errno::CONNREFUSED);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
