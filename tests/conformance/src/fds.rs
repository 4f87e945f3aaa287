//! Descriptors between two processes of a behaviour, over their socket.

use std::io::{Error, Read, Result, Write};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Room for one descriptor's control message, aligned as one.
#[repr(align(8))]
struct Room([u8; 32]);

fn message(room: &mut Room, byte: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: zero bytes are a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = byte;
    message.msg_iovlen = 1;
    message.msg_control = room.0.as_mut_ptr().cast();
    message.msg_controllen = room.0.len() as _;
    message
}

/// Sends one descriptor; the caller keeps its own.
pub(crate) fn send(socket: &UnixStream, fd: RawFd) -> Result<()> {
    let (mut room, mut letter) = (Room([0; 32]), *b"f");
    let mut byte = libc::iovec {
        iov_base: letter.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut message = message(&mut room, &mut byte);
    // SAFETY: CMSG_SPACE computes; the room has that many bytes (24 for one descriptor).
    message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as _;
    // SAFETY: the message has a control buffer with room for one header and one descriptor, so the first header is inside.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
    }
    // SAFETY: all that the message points to lives until the call returns.
    match unsafe { libc::sendmsg(socket.as_raw_fd(), &message, 0) } {
        1 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Receives one descriptor.
pub(crate) fn receive(socket: &UnixStream) -> Result<OwnedFd> {
    let (mut room, mut letter) = (Room([0; 32]), [0_u8; 1]);
    let mut byte = libc::iovec {
        iov_base: letter.as_mut_ptr().cast(),
        iov_len: 1,
    };
    let mut message = message(&mut room, &mut byte);
    // SAFETY: all that the message points to lives until the call returns.
    if unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) } != 1 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel filled the control buffer; the header that it gives lies inside, with its length.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(Error::other("no descriptor came"));
        }
        let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        // The kernel made this descriptor for us; nobody else owns it.
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sends bytes of a fixed number.
#[track_caller]
pub(crate) fn tell(mut socket: &UnixStream, bytes: &[u8]) {
    socket.write_all(bytes).expect("the other process reads");
}

/// Waits for so many bytes.
#[track_caller]
pub(crate) fn hear<const N: usize>(mut socket: &UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).expect("the other process writes");
    bytes
}
