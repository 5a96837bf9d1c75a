"""The study around the method: data, networks, training, comparison and reports (extra ``study``)."""
