//! Internal crate of `afresh`. Egress: what guests may connect to, and a proxy that checks their
//! requests.
//!
//! A [`NetGrant`] is a [`Destination`], which any protocol may reach, or a [`Rule`] for HTTP
//! requests to one. An [`EgressPolicy`] has all grants of a guest, and returns the [`Route`] of a
//! connection. The network code of a guest hands a [`Route::Proxied`] connection to
//! [`ProxiedServer::serve`], which reads each request, checks it, adds the rule's headers and its
//! secret, and passes it to the rule's server. Each connection has a record in a [`ConnectionLog`].
//! An [`EgressFilter`] narrows the grants for one guest. Limits of the process have a share for
//! each [`ConnectionOwner`].
//!
//! The crate knows nothing of guests: it gets one end of a pair of sockets, and the connection ends
//! with the other.

mod authority;
mod body;
mod credential;
mod der;
mod destination;
mod filter;
mod log;
mod owner;
mod path;
mod peer;
mod policy;
mod proxy;
mod request_head;
mod response_head;
mod rule;
mod shared_limit;
mod stream_socket;
mod tls;

pub use authority::{Authority, AuthorityError};
pub use body::BodyDecoder;
pub use destination::{DENIED, Destination, DestinationQuery, ParseDestinationError, Server};
pub use filter::{EgressFilter, FilterError, SharedFilter};
pub use log::{ConnectionLog, ConnectionReceiver, ConnectionRecord, MAX_RECORDS, Outcome};
pub use owner::ConnectionOwner;
pub use path::{ParsePatternError, PathPattern, RequestTarget};
pub use policy::{EgressPolicy, Route};
pub use proxy::{ProxiedServer, ProxyQuota};
pub use request_head::{BodyFraming, MAX_HEAD, RequestHead};
pub use rule::{NetGrant, ParseGrantError, Rule, RuleError};
pub use shared_limit::{LimitReached, SharedLimit, SharedPlace};
pub use stream_socket::StreamSocket;
