//! Text to samples on the fly.
//!
//! Inputs are cut into shards. Each epoch orders the shards anew, reads several side by side, takes documents from them
//! in turns, shuffles the documents of a window, and cuts the row of their tokens into samples. All of that is a
//! function of the inputs, the seed and the position alone: not of threads, ranks or restarts. [`StreamState`] is the
//! position behind a sample, in a few numbers: where the window began in each input, and how far it was used up.
#![forbid(unsafe_code)]

mod documents;
mod error;
mod feed;
mod options;
mod output;
mod packer;
mod shards;
mod shuffle;
mod source;
mod state;
mod window;

pub use documents::DocumentPlace;
pub use error::StreamError;
pub use options::{OnBadRecord, StreamOptions, text_share};
pub use output::StreamCounts;
pub use packer::StreamPiece;
pub use source::StreamSource;
pub use state::{LaneState, STREAM_STATE_VERSION, StreamState, WindowState};
