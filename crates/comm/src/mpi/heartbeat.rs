//! UDP heartbeats around a ring of nodes. Ranks of one node see each other through their shared page, but a rank that
//! is alone on its node could stand still unnoticed for the whole timeout. The first rank of each node therefore
//! sends datagrams to that of the next node, which reports it when they stop.
//!
//! Best effort: if the network drops the datagrams, nobody is reported and a message is logged.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ptr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::wait_timer::WaitTimer;

/// The interval between heartbeats.
const PERIOD: Duration = Duration::from_millis(500);

/// The time after which a rank that was never heard is taken for unreachable.
const GRACE: Duration = Duration::from_secs(10);

/// The most addresses of a rank. Heartbeats go to all of them each time, so that nobody has to know which one leads
/// there.
const MAX_ADDRESSES: usize = 8;

/// The contact data that ranks exchange at the start: the number that their heartbeats carry, the port, and the
/// addresses in two words each.
pub(crate) type Contact = [u64; 2 + 2 * MAX_ADDRESSES];

/// The contact data of a rank that sends nothing.
pub(crate) const NO_CONTACT: Contact = [0; 2 + 2 * MAX_ADDRESSES];

/// The socket, before its peers are known.
pub(crate) struct HeartbeatSocket {
    socket: UdpSocket,
    contact: Contact,
}

impl HeartbeatSocket {
    pub(crate) fn open() -> io::Result<Self> {
        let any = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::from([0, 0, 0, 0])].map(|ip| SocketAddr::new(ip, 0));
        let socket = UdpSocket::bind(&any[..])?;
        socket.set_nonblocking(true)?;
        let mut contact = NO_CONTACT;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        contact[0] = (now.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40);
        contact[1] = socket.local_addr()?.port().into();
        for (words, address) in contact[2..].chunks_exact_mut(2).zip(addresses()) {
            let bits = address.to_bits();
            (words[0], words[1]) = ((bits >> 64) as u64, bits as u64);
        }
        Ok(Self { socket, contact })
    }

    pub(crate) fn contact(&self) -> &Contact {
        &self.contact
    }

    /// Starts heartbeats to the rank with the contact data `next`, and the watch over `rank`, whose contact data is
    /// `previous`.
    pub(crate) fn connect(self, next: &Contact, rank: usize, previous: &Contact) -> Heartbeat {
        let is_v6 = self.socket.local_addr().is_ok_and(|address| address.is_ipv6());
        let targets = next[2..].chunks_exact(2).map(|words| u128::from(words[0]) << 64 | u128::from(words[1]));
        let targets = targets.filter(|&bits| bits != 0).map(|bits| {
            let address = Ipv6Addr::from_bits(bits);
            let ip = if is_v6 { IpAddr::V6(address) } else { address.to_canonical() };
            SocketAddr::new(ip, next[1] as u16)
        });
        Heartbeat {
            targets: targets.collect(),
            socket: self.socket,
            own: self.contact[0],
            rank,
            expected: previous[0],
            sent: None,
            since: WaitTimer::new(),
            is_heard: false,
            is_given_up: false,
        }
    }
}

/// The heartbeats that a rank sends, and the watch over those of another.
pub(crate) struct Heartbeat {
    socket: UdpSocket,
    own: u64,
    targets: Vec<SocketAddr>,
    /// The rank that is watched, and the number that its heartbeats carry.
    rank: usize,
    expected: u64,
    sent: Option<Instant>,
    /// The time since its last heartbeat, or since the start.
    since: WaitTimer,
    is_heard: bool,
    is_given_up: bool,
}

impl Heartbeat {
    /// Sends a heartbeat if one is due and reads those that came. Call it several times a second. Returns the watched
    /// rank and how long it has been silent, if it was ever heard.
    pub(crate) fn beat(&mut self) -> Option<(usize, Duration)> {
        if self.sent.is_none_or(|sent| sent.elapsed() >= PERIOD) {
            self.sent = Some(Instant::now());
            for target in &self.targets {
                // Some of the addresses may lead nowhere.
                let _ = self.socket.send_to(&self.own.to_le_bytes(), target);
            }
        }
        if self.receive_heartbeats() {
            (self.since, self.is_heard) = (WaitTimer::new(), true);
        }
        let silence = self.since.tick();
        if !self.is_heard && !self.is_given_up && silence >= GRACE {
            self.is_given_up = true;
            let rank = self.rank;
            tracing::info!(
                "no heartbeat comes from rank {rank} on another node (a firewall?): if its process stands still while \
                 ranks may take long, as for a checkpoint, it is reported only after the timeout"
            );
        }
        self.is_heard.then_some((self.rank, silence))
    }

    /// Reads all datagrams, and returns whether one is a heartbeat of the watched rank.
    fn receive_heartbeats(&self) -> bool {
        let mut sign = [0; 8];
        let mut is_heard = false;
        while let Ok((len, _)) = self.socket.recv_from(&mut sign) {
            is_heard |= len == sign.len() && u64::from_le_bytes(sign) == self.expected;
        }
        is_heard
    }
}

/// Returns this machine's addresses as IPv6, loopback addresses last.
fn addresses() -> Vec<Ipv6Addr> {
    let mut list = ptr::null_mut();
    // SAFETY: `list` is valid for writing; freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: the entries of the list, which is not freed yet.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: the entry's address, null or as long as its family says.
        found.extend(unsafe { address(entry.ifa_addr) });
        next = entry.ifa_next;
    }
    // SAFETY: the list that was made above.
    unsafe { libc::freeifaddrs(list) };
    // A link-local address means nothing without the name of its link.
    found.retain(|address: &IpAddr| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    found.sort_by_key(IpAddr::is_loopback);
    let as_v6 = |address| match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    found.into_iter().map(as_v6).take(MAX_ADDRESSES).collect()
}

/// # Safety
/// `address` is null or valid for reading as the structure of its family.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise, for each.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(IpAddr::from(v6.sin6_addr.s6_addr))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> [Heartbeat; 2] {
        let sockets = [(); 2].map(|()| HeartbeatSocket::open().expect("a socket"));
        let [a, b] = [*sockets[0].contact(), *sockets[1].contact()];
        let [first, second] = sockets;
        [first.connect(&b, 1, &b), second.connect(&a, 0, &a)]
    }

    fn within_a_second(mut is_so: impl FnMut() -> bool) -> bool {
        (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            is_so()
        })
    }

    #[test]
    fn a_rank_that_falls_silent_after_being_heard_is_reported() {
        let [mut a, mut b] = pair();
        assert_eq!(a.beat(), None, "nothing was ever heard");
        assert!(within_a_second(|| b.beat().is_some() && a.beat().is_some()));
        assert!(within_a_second(|| a.beat().is_some_and(|(rank, silence)| rank == 1 && silence.as_millis() > 100)));
        b.sent = None;
        assert!(within_a_second(|| {
            b.beat();
            a.beat().is_some_and(|(_, silence)| silence.as_millis() < 50)
        }));
    }

    #[test]
    fn datagrams_of_strangers_do_not_count() {
        let [mut a, _b] = pair();
        let [mut stranger, _] = pair();
        stranger.targets = vec![SocketAddr::new(IpAddr::from([127, 0, 0, 1]), a.socket.local_addr().unwrap().port())];
        assert!(!within_a_second(|| {
            stranger.sent = None;
            stranger.beat();
            a.beat().is_some()
        }));
    }
}
