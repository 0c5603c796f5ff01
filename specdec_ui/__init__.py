"""The Gradio page. Read in this order: `state`, `highlight`, `handlers`, `layout`."""
