//! One long text on several threads: the thread that has it posts parts of it, whoever is free encodes them.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use megaflow_tokenize::{Encoder, TokenizeError};

/// A part of a text, copied out of its block, so that it may outlive a thread that has failed.
pub(crate) struct Part {
    text: String,
    place: usize,
    reply: Sender<(usize, Encoded)>,
}

/// Ids of a part and the places where it spelled a special token; or what the thread panicked with.
type Encoded = thread::Result<Result<(Vec<u32>, u64), TokenizeError>>;

impl Part {
    /// Encodes the part and tells the thread that posted it.
    pub(crate) fn encode(self, encoder: &mut Encoder) {
        let encoded = catch_unwind(AssertUnwindSafe(|| {
            let (mut ids, hits) = (Vec::new(), encoder.special_hits());
            encoder.encode_part(&self.text, &mut ids)?;
            Ok((ids, encoder.special_hits() - hits))
        }));
        let _ = self.reply.send((self.place, encoded)); // nobody listens after an error
    }
}

/// The queue of the parts of all threads.
#[derive(Clone)]
pub(crate) struct PartQueue {
    post: Sender<Part>,
    take: Receiver<Part>,
    /// Most parts of one text that are posted or encoded at a time.
    ahead: usize,
}

impl PartQueue {
    /// A queue for so many threads.
    pub(crate) fn new(threads: usize) -> Self {
        let (post, take) = unbounded(); // each thread bounds what it posts
        Self { post, take, ahead: 2 * threads }
    }

    /// Whether anyone could help.
    pub(crate) fn is_shared(&self) -> bool {
        self.ahead > 2
    }

    /// Parts that wait for a thread. Ends when all queues are dropped.
    pub(crate) fn parts(&self) -> Receiver<Part> {
        self.take.clone()
    }

    /// Appends the ids of a text, given in parts, and returns how often it spelled a special token. The calling thread encodes
    /// as well.
    pub(crate) fn encode<'a>(
        &self,
        mut parts: impl Iterator<Item = &'a str>,
        encoder: &mut Encoder,
        ids: &mut Vec<u32>,
    ) -> Result<u64, TokenizeError> {
        let (reply, replies) = unbounded();
        let mut early = BTreeMap::new();
        let (mut posted, mut taken, mut hits) = (0, 0, 0);
        loop {
            while posted < taken + self.ahead {
                let Some(text) = parts.next() else { break };
                let part = Part { text: text.to_owned(), place: posted, reply: reply.clone() };
                let _ = self.post.send(part); // this thread holds a receiver
                posted += 1;
            }
            if taken == posted {
                return Ok(hits);
            }
            early.extend(replies.try_iter());
            if let Some(encoded) = early.remove(&taken) {
                let (more, more_hits) = encoded.unwrap_or_else(|panic| resume_unwind(panic))?;
                ids.extend_from_slice(&more);
                hits += more_hits;
                taken += 1;
            } else if let Ok(part) = self.take.try_recv() {
                part.encode(encoder); // of this text or of another: all must be done
            } else {
                early.extend(replies.recv()); // another thread is at it
            }
        }
    }
}
