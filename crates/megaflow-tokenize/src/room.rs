//! The memory of a batch's ids, from one batch to the next.
//!
//! The system clears new memory a page at a time, which costs as much time as several ids' encoding: a caller who encodes
//! batch after batch gets the memory of one that nobody reads any more.

use std::sync::{Arc, Mutex, Weak};

/// Memory for ids that nobody uses at the moment.
///
/// Nobody waits for the lock (see [`crate::idle`]): where it is taken, memory is asked for or given back to the system.
#[derive(Default)]
pub(crate) struct IdRoom {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    ids: Vec<u32>,
    most_bytes: usize,
}

impl IdRoom {
    /// An empty row for the ids of `bytes` bytes of text: with the memory that was given back, unless that is much more than
    /// they need.
    pub(crate) fn take(&self, bytes: usize) -> Vec<u32> {
        let Ok(mut kept) = self.kept.try_lock() else { return Vec::new() };
        if kept.ids.capacity() <= bytes { std::mem::take(&mut kept.ids) } else { Vec::new() }
    }

    /// Lets no more than so many bytes be kept from now on.
    pub(crate) fn limit(&self, most_bytes: usize) {
        let _gone = self.kept.try_lock().ok().and_then(|mut kept| {
            kept.most_bytes = most_bytes;
            (bytes_of(&kept.ids) > most_bytes).then(|| std::mem::take(&mut kept.ids))
        });
    }

    /// Keeps a row's memory, or the one that is kept if that is larger.
    fn give_back(&self, mut ids: Vec<u32>) {
        ids.clear();
        if let Ok(mut kept) = self.kept.try_lock() {
            if ids.capacity() > kept.ids.capacity() && bytes_of(&ids) <= kept.most_bytes {
                std::mem::swap(&mut kept.ids, &mut ids);
            }
        }
        // What is left in `ids` goes back to the system after the lock.
    }
}

fn bytes_of(ids: &Vec<u32>) -> usize {
    ids.capacity() * size_of::<u32>()
}

/// Where the ids of a batch can be given back to once nobody reads them; does not keep the tokenizer alive.
#[derive(Debug, Clone)]
pub struct UsedIds(Weak<IdRoom>);

impl UsedIds {
    pub(crate) fn of(room: &Arc<IdRoom>) -> Self {
        Self(Arc::downgrade(room))
    }

    /// Gives back the memory of ids for a later batch. It is kept as long as word caches leave room for it within
    /// [`cache_bytes`](crate::EncodeOptions::cache_bytes).
    pub fn give_back(&self, ids: Vec<u32>) {
        if let Some(room) = self.0.upgrade() {
            room.give_back(ids);
        }
    }
}

impl std::fmt::Debug for IdRoom {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("IdRoom").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(most_bytes: usize) -> (Arc<IdRoom>, UsedIds) {
        let room = Arc::new(IdRoom::default());
        room.limit(most_bytes);
        let used = UsedIds::of(&room);
        (room, used)
    }

    #[test]
    fn memory_comes_back_empty_and_once() {
        let (room, used) = room(1 << 20);
        let ids = vec![7u32; 1000];
        let address = ids.as_ptr();
        used.give_back(ids);
        let again = room.take(1000);
        assert_eq!((again.as_ptr(), again.len(), again.capacity()), (address, 0, 1000));
        assert_eq!(room.take(1000).capacity(), 0);
    }

    #[test]
    fn a_small_batch_does_not_get_the_memory_of_a_large_one() {
        let (room, used) = room(1 << 20);
        used.give_back(vec![7u32; 1000]);
        assert_eq!(room.take(999).capacity(), 0);
        assert_eq!(room.take(1000).capacity(), 1000);
    }

    #[test]
    fn the_largest_within_the_limit_is_kept() {
        let (room, used) = room(4000);
        used.give_back(vec![7u32; 1001]);
        used.give_back(vec![7u32; 500]);
        used.give_back(vec![7u32; 400]);
        assert_eq!(room.take(2000).capacity(), 500);
        used.give_back(vec![7u32; 500]);
        room.limit(1999);
        assert_eq!(room.take(2000).capacity(), 0);
    }

    #[test]
    fn what_is_given_back_to_a_tokenizer_that_is_gone_or_busy_is_dropped() {
        let (room, used) = room(4000);
        let busy = room.kept.lock().unwrap();
        used.give_back(vec![7u32; 500]);
        assert_eq!(room.take(500).capacity(), 0);
        drop(busy);
        assert_eq!(room.take(500).capacity(), 0);
        drop(room);
        used.give_back(vec![7u32; 500]);
    }
}
