//! The replicas: where they are, whether they answer, what they have under way, and which of them gets a request.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::affinity::Key;
use super::client::Client;
use crate::tls::ClientTls;

/// Requests that a replica may have before others must have nearly as many.
const FREE_REQUESTS: usize = 4;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host and port.
    pub authority: String,
    /// Says whether it speaks TLS.
    pub is_tls: bool,
}

/// A text that is no address of a server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// It begins with neither `http://` nor `https://`.
    #[error("must begin with http:// or https://, as in http://10.0.0.2:8000")]
    Scheme,
    /// There is something behind the port.
    #[error("must end with the port: requests keep their own paths")]
    Path,
    /// There is no host, or the port is none.
    #[error("must be http://HOST:PORT or https://HOST:PORT")]
    Authority,
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let plain = text.strip_prefix("http://");
        let is_tls = plain.is_none();
        let rest = plain.or_else(|| text.strip_prefix("https://")).ok_or(EndpointError::Scheme)?;
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#', '@']) {
            return Err(EndpointError::Path);
        }
        let is_host = |host: &str| !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic());
        let is_bracketed = authority.ends_with(']');
        let (host, port) = match authority.rsplit_once(':').filter(|_| !is_bracketed) {
            Some((host, port)) => (host, port.parse::<u16>().map_err(|_| EndpointError::Authority)?),
            None => (authority, if is_tls { 443 } else { 80 }),
        };
        if !is_host(host) || port == 0 {
            return Err(EndpointError::Authority);
        }
        Ok(Self { authority: format!("{host}:{port}"), is_tls })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority)
    }
}

/// A server with what is known of it.
pub(crate) struct Replica {
    pub(crate) endpoint: Endpoint,
    pub(crate) client: Client,
    is_up: AtomicBool,
    num_requests: AtomicUsize,
}

impl Replica {
    /// Returns whether it answered when it was last looked at.
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Acquire)
    }

    /// Says whether it answers; returns whether that is news.
    pub(crate) fn set_up(&self, is_up: bool) -> bool {
        if !is_up {
            self.client.forget_idle();
        }
        self.is_up.swap(is_up, Ordering::AcqRel) != is_up
    }

    /// Requests of this gateway that it has under way.
    pub(crate) fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Acquire)
    }
}

/// The replicas of a gateway.
pub(crate) struct Replicas(Vec<Arc<Replica>>);

/// The replica of a request. The request counts as the replica's until this is dropped.
pub(crate) struct Chosen {
    pub(crate) index: usize,
    pub(crate) replica: Arc<Replica>,
    /// True if it is the one that is likeliest to have the beginning of the prompt.
    pub(crate) is_first_choice: bool,
}

impl Drop for Chosen {
    fn drop(&mut self) {
        self.replica.num_requests.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Replicas {
    pub(crate) fn new(endpoints: &[Endpoint], tls: Option<&ClientTls>) -> Self {
        let replica = |endpoint: &Endpoint| {
            let client = Client::new(endpoint.clone(), tls.cloned());
            let (is_up, num_requests) = (AtomicBool::new(false), AtomicUsize::new(0));
            Arc::new(Replica { endpoint: endpoint.clone(), client, is_up, num_requests })
        };
        Self(endpoints.iter().map(replica).collect())
    }

    pub(crate) fn all(&self) -> &[Arc<Replica>] {
        &self.0
    }

    pub(crate) fn num_up(&self) -> usize {
        self.0.iter().filter(|replica| replica.is_up()).count()
    }

    /// Chooses a replica that is up and not in `tried`: the one that `key` prefers among those that do not have too
    /// much under way, or the one with the least.
    pub(crate) fn choose(&self, key: Option<Key>, tried: &[usize]) -> Option<Chosen> {
        let candidates = self.0.iter().enumerate().filter(|(index, one)| one.is_up() && !tried.contains(index));
        let loads: Vec<Load> =
            candidates.map(|(index, one)| Load { index, num_requests: one.num_requests() }).collect();
        let names: Vec<&str> = self.0.iter().map(|replica| replica.endpoint.authority.as_str()).collect();
        let preferred = key.map(|key| key.ranked(&names)).unwrap_or_default();
        let (index, is_first_choice) = choose(&loads, &preferred)?;
        let replica = Arc::clone(&self.0[index]);
        replica.num_requests.fetch_add(1, Ordering::AcqRel);
        Some(Chosen { index, replica, is_first_choice })
    }
}

/// A replica that could take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) index: usize,
    pub(super) num_requests: usize,
}

/// Chooses among replicas; `preferred` has the indices of all, the likeliest to know the prompt first, or nothing.
/// Returns the choice and whether it is the most preferred one of all.
///
/// A replica may have a quarter more than the mean (consistent hashing with bounded loads, Mirrokni et al.,
/// 1608.01350).
pub(super) fn choose(loads: &[Load], preferred: &[usize]) -> Option<(usize, bool)> {
    let total: usize = loads.iter().map(|load| load.num_requests).sum();
    let most = ((total + 1) * 5).div_ceil(loads.len().max(1) * 4).max(FREE_REQUESTS);
    let load_of = |index: &usize| loads.iter().find(|load| load.index == *index);
    let has_room = |index: &&usize| load_of(index).is_some_and(|load| load.num_requests < most);
    if let Some(&index) = preferred.iter().find(has_room) {
        return Some((index, preferred.first() == Some(&index)));
    }
    loads.iter().min_by_key(|load| (load.num_requests, load.index)).map(|load| (load.index, false))
}
